"""What each turn cost, kept for weeks in a small file."""
