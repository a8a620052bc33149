"""What other libraries have: models of transformers, which must be installed, and masks as arrays
or as functions of FlexAttention. Each module here is loaded by name.
"""
