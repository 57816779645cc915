"""The five tools: each module holds one tool's parser and main(); common holds what they share."""
