"""Other APIs for conversations, translated to and from chat: Anthropic's Messages, OpenAI's Responses."""
