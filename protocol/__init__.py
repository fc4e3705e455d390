"""What passes between peers: messages, tensors, identities and the transports that carry them."""
