"""Jobs, models, devices and tools that several tests share."""
