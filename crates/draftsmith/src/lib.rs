//! Trains what makes speculative decoding faster, and proves it.
