"""A training job in one YAML file: cp_ring validates it, makes Megatron's command line, and
launches the ranks of this node.
"""
