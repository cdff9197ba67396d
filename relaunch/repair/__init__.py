"""The repair of one node: decides its next step. Pure: reads no clock and makes no calls."""
