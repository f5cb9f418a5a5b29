"""Transports: how episodes get from where they are made to where they are trained on."""
