"""What the repair of one node does next. Pure: reads no clock, calls nothing."""
