//! The OpenAI API: chat completions, completions, models, errors.
