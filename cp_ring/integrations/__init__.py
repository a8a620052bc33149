"""Other libraries' models with ring attention. A module here is imported by name, and needs its
library installed.
"""
