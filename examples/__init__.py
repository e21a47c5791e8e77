"""The demo, its small target model, and its conversations."""
