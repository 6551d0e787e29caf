"""Devices and dtypes: half precision, models spread over devices, models shared among processes."""
