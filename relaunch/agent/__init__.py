"""What relaunch runs on a node: it reports facts and obeys orders, and decides nothing but to fence itself."""
