"""Graph passes: detection, planning, rewriting and lowering."""
