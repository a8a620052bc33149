"""Layers whose state runs along the sequence: ranks scan their own tokens, and the maps of their
segments pass by one gather. Nothing else imports this package.

`segments`, what ranks hold and exchange; `proof` of it; `messages`; `states`, the layers' calls.
"""
