//! Times of the core alone: `cargo bench`.
fn main() {
    divan::main();
}
