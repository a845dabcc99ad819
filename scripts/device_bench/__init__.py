"""What `scripts/device_check` runs."""
