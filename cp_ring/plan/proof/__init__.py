"""The proof of a plan, for all ranks at once and for the rank plans that are executed. It shares no
code with what makes plans, beside the types of tables.
"""
