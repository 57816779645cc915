"""What runs on or beside the device: stamps of streams and events."""
