"""Forecasts of steps on links that are not there, from costs of messages measured on this machine."""
