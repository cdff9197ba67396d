"""Who gets which node of a fleet. Pure: reads no clock, calls nothing."""
