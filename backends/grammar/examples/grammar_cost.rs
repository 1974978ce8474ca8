//! Cost of one grammar in a process of its own: `cost NAME` compiles a text of the hostile corpus, `cost` alone each of
//! them in turn, each in a process of its own. Prints CPU seconds, memory above the vocabulary's, and the outcome.

#[path = "../tests/all/hostile_corpus.rs"]
mod hostile_corpus;
#[path = "../tests/all/measure.rs"]
mod measure;

fn main() {
    match std::env::args().nth(1) {
        Some(name) => {
            let corpus = hostile_corpus::corpus();
            let (_, source) = corpus.iter().find(|(other, _)| *other == name).expect("a name of the corpus");
            println!("{}", measure::measure(source));
        }
        None => {
            let program = std::env::current_exe().expect("this program");
            for (name, _) in hostile_corpus::corpus() {
                let output = std::process::Command::new(&program).arg(name).output().expect("started");
                let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
                println!("{name}: {}{}", text.trim(), if output.status.success() { "" } else { errors.trim() });
            }
        }
    }
}
