"""The proof of a plan, for all ranks at once and for the rank plans that are executed. It shares no
code with the makers of plans, except the types of tables.
"""
