"""What one piece of evidence says: exits, logs, Xids, DCGM, NVML, health. Pure: knows no jobs."""
