"""Upgrades of a service while its jobs run, with builds of relaunch that differ from this one."""
