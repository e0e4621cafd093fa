"""Settings, values and group layout that every other folder uses."""
