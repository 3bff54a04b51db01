"""Runs on machines elsewhere: one spec, and what the engines that start it take."""
