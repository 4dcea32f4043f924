"""A small inference engine on NumPy: `Engine.load(path)`, prefill, decode, generate, chat."""

from course_lib.engine.config import ModelConfig
from course_lib.engine.conversation import Answer, Conversation, Reply
from course_lib.engine.engine import Engine
from course_lib.engine.generate import GeneratedToken, Generation, generate_from, stream_from
from course_lib.engine.sampling import Sampler
from course_lib.engine.session import Session

__all__ = [
    "Answer",
    "Conversation",
    "Engine",
    "GeneratedToken",
    "Generation",
    "ModelConfig",
    "Reply",
    "Sampler",
    "Session",
    "generate_from",
    "stream_from",
]
