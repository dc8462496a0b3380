"""3D and sensing."""
