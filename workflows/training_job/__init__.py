"""The workflow of one training job."""
