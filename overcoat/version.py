"""The version, readable without importing torch."""

VERSION = "0.2.0"
