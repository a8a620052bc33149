"""A training job as one YAML file: validated, turned into Megatron's command line, launched on this node's ranks."""
