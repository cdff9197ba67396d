"""What one job does next. Pure: reads no clock, calls nothing."""
