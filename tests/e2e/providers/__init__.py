"""Mock providers: each behaves as its published API says, refuses what that API refuses, and can misbehave on request."""

from providers.anthropic import Anthropic
from providers.bedrock import Bedrock
from providers.gemini import Gemini
from providers.openai import OpenAi
from providers.server import Fault, Provider

__all__ = ["Anthropic", "Bedrock", "Fault", "Gemini", "OpenAi", "Provider"]
