"""Figures of merit: pure functions of answers, retrieved ids and negative log likelihoods."""
