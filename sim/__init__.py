"""Many peers on one machine, and the measuring of them."""
