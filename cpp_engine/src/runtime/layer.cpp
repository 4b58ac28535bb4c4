// Placeholder that keeps the layer buildable until its first source lands.
