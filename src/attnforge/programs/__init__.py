"""What is computed, as a list of operations over tokens and channels; where its values live; its meaning."""
