"""The survey: every architecture that the libraries offer, built small, converted and measured, one row each."""
