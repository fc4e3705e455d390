"""The methods that FedeRiCo is compared with: one file each, readable top to bottom."""
