"""One participant: its algorithm, its learner and the daemon that drives them."""
