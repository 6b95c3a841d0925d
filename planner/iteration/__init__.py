"""What trace and record both watch: hooks, storages, placement, numbers read."""
