"""A node that lies: a grammar of lies drawn from a seed, told over the real pipe of a session."""
