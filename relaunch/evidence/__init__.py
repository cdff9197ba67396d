"""Read single pieces of evidence: exits, logs, Xids, DCGM, NVML, health. Pure; knows no jobs."""
