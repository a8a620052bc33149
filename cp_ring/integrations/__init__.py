"""Models of other libraries with ring attention. Each module here is imported by name, and needs
its library installed.
"""
