"""How fast training comes back: the same ranks under relaunch, torchrun and a bare loop, measured by the same clock."""
