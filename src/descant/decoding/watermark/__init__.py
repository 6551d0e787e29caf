"""Watermarks: each scheme with its processor and its detection, and the detectors and reports of all."""

from descant.decoding.watermark.keys import read_settings as read_settings
