"""What each release wrote, one file a release, kept for ever and read by the code of today."""
