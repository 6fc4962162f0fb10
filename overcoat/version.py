"""The version, readable without importing torch."""

VERSION = "0.1.0"
