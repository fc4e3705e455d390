"""Where addresses of other peers come from."""
