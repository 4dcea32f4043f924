"""A small Qwen3 inference engine on NumPy: `Engine.load(folder)`, prefill, decode, generate."""

from course_lib.engine.config import ModelConfig
from course_lib.engine.engine import Engine
from course_lib.engine.generate import Generation, generate_from
from course_lib.engine.session import Session

__all__ = ["Engine", "Generation", "ModelConfig", "Session", "generate_from"]
