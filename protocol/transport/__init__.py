"""How whole models and gradients reach other peers: one interface, two transports."""
