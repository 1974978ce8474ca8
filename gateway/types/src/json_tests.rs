use super::*;
use crate::json_text::compacted;

fn read<T>(text: &str, read: impl FnOnce(&mut Reader<'_>) -> Result<T, Fault>) -> Result<T, (usize, &'static str)> {
    let syntax = |fault| match fault {
        Fault::Syntax { at, what } => (at, what),
        Fault::Refused(error) => panic!("refused: {error}"),
    };
    let mut reader = Reader::new(text.as_bytes()).map_err(syntax)?;
    let value = read(&mut reader).map_err(syntax)?;
    reader.end().map_err(syntax)?;
    Ok(value)
}

#[track_caller]
fn check_string(text: &str, expected: Result<&str, (usize, &'static str)>) {
    let got = read(text, |reader| reader.string().map(Cow::into_owned));
    assert_eq!(got.as_deref().map_err(|fault| *fault), expected, "{text}");
}

#[track_caller]
fn check_skip(text: &str, expected: Result<(), (usize, &'static str)>) {
    assert_eq!(read(text, |reader| reader.skip()), expected, "{text}");
    if expected.is_ok() {
        serde_json::from_str::<serde_json::Value>(text).expect("serde_json agrees that it is JSON");
    }
}

#[test]
fn strings_are_read_whole() {
    check_string(r#""""#, Ok(""));
    check_string(r#""plain, longer than one word of eight bytes""#, Ok("plain, longer than one word of eight bytes"));
    check_string(r#""a\"b\\c\/d\b\f\n\r\t""#, Ok("a\"b\\c/d\u{8}\u{c}\n\r\t"));
    check_string(r#""\u00e9\u20ac\ud83d\ude00!""#, Ok("é€😀!"));
    check_string("\"é€😀 \u{2028}\u{7f}\"", Ok("é€😀 \u{2028}\u{7f}"));
}

#[test]
fn strings_that_are_no_text_are_refused() {
    check_string(r#""\ud800""#, Err((1, "a lone surrogate in a string")));
    check_string(r#""ab\udc00\ud800""#, Err((3, "a lone surrogate in a string")));
    check_string(r#""\ud800\u0041""#, Err((1, "a lone surrogate in a string")));
    check_string(r#""\ud800\ud800""#, Err((1, "a lone surrogate in a string")));
    check_string(r#""\u12g4""#, Err((1, "a bad \\u escape in a string")));
    check_string(r#""\u+123""#, Err((1, "a bad \\u escape in a string")));
    check_string(r#""\u12""#, Err((1, "a bad \\u escape in a string")));
    check_string(r#""\x41""#, Err((1, "an unknown escape in a string")));
    check_string("\"\\é\"", Err((1, "an unknown escape in a string")));
    check_string("\"a\nb\"", Err((2, "a control character in a string")));
    check_string("\"eight by\0tes\"", Err((9, "a control character in a string")));
    check_string("\"abc", Err((4, "unexpected end in a string")));
    check_string("\"abc\\", Err((5, "unexpected end in a string")));
    check_string("\"abc\\\"", Err((6, "unexpected end in a string")));
}

#[test]
fn values_follow_the_grammar() {
    for good in [
        "null",
        " true ",
        "false",
        "0",
        "-0",
        "-0.5e+10",
        "1E5",
        "[]",
        "{}",
        "[1, [2,{\"a\":{}}]]",
        "\t{\"a\" : [ ] }\r\n",
    ] {
        check_skip(good, Ok(()));
    }
    check_skip("", Err((0, "unexpected end")));
    check_skip("nul", Err((0, "expected a value")));
    check_skip("tru", Err((0, "expected a value")));
    check_skip("'a'", Err((0, "expected a value")));
    check_skip("NaN", Err((0, "NaN and Infinity are not JSON")));
    check_skip("[Infinity]", Err((1, "NaN and Infinity are not JSON")));
    check_skip("-Infinity", Err((1, "NaN and Infinity are not JSON")));
    check_skip("01", Err((1, "a number with a leading zero")));
    check_skip("+1", Err((0, "expected a value")));
    check_skip(".5", Err((0, "expected a value")));
    check_skip("1.", Err((2, "expected a digit")));
    check_skip("1e", Err((2, "expected a digit")));
    check_skip("-", Err((1, "expected a digit")));
    check_skip("1 2", Err((2, "something follows the JSON value")));
    check_skip("{} x", Err((3, "something follows the JSON value")));
    check_skip("[1,]", Err((3, "expected a value")));
    check_skip("[1 2]", Err((3, "expected ',' or ']'")));
    check_skip("{\"a\":1,}", Err((7, "expected a field name in double quotes")));
    check_skip("{a:1}", Err((1, "expected a field name in double quotes")));
    check_skip("{\"a\" 1}", Err((5, "expected ':'")));
    check_skip("{\"a\":1 \"b\":2}", Err((7, "expected ',' or '}'")));
    check_skip("{\"a\":1", Err((6, "unexpected end")));
    check_skip("[1}", Err((2, "expected ',' or ']'")));
    check_skip("\u{feff}{}", Err((0, "expected a value")));
}

#[test]
fn depth_is_bounded_exactly() {
    let nested = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
    check_skip(&nested(DEPTH_MAX), Ok(()));
    check_skip(&nested(DEPTH_MAX + 1), Err((DEPTH_MAX, "nested deeper than 64 levels")));
    check_skip(&"{\"a\":".repeat(1_000_000), Err((DEPTH_MAX * 5, "nested deeper than 64 levels")));
}

#[test]
fn invalid_utf8_is_named_with_its_place() {
    let fault = Reader::new(b"{\"a\":\"\xff\"}").err().expect("not UTF-8");
    assert_eq!(fault.into_error().message, "The body is not valid JSON: invalid UTF-8 at byte 6.");
}

#[test]
fn raw_tells_text_and_depth() {
    let mut reader = Reader::new(b"[ {\"a\": [1, {}]} , 5]").expect("UTF-8");
    let mut seen = Vec::new();
    reader
        .array(|reader, _| {
            let raw = reader.raw()?;
            seen.push((raw.text.to_owned(), raw.depth));
            Ok(())
        })
        .expect("an array");
    assert_eq!(seen, [("{\"a\": [1, {}]}".to_owned(), 3), ("5".to_owned(), 0)]);
}

#[test]
fn compacting_leaves_strings_alone() {
    assert_eq!(
        compacted(" { \"a b\" : [ 1 ,\n\t2 ] , \"c\\\" d\" : \" e \" } "),
        "{\"a b\":[1,2],\"c\\\" d\":\" e \"}"
    );
}

#[test]
fn plain_runs_end_at_the_first_special_byte_wherever_it_is() {
    for special in [b'"', b'\\', 0, 0x1f] {
        for at in 0..20 {
            let mut bytes = vec![b' '; 20];
            bytes[at] = special;
            assert_eq!(plain_run(&bytes), at);
            bytes[at] = 0x80 | special;
            assert_eq!(plain_run(&bytes), 20);
        }
    }
}

#[test]
fn a_fault_gathers_its_path_on_the_way_out() {
    let fault: Result<(), Fault> = Err(Fault::invalid("expected a string, got a number"));
    let error =
        fault.within("text").at(3).within("content").at(2).within("messages").expect_err("a fault").into_error();
    assert_eq!(error.param.as_deref(), Some("messages[2].content[3].text"));
    assert_eq!(error.message, "messages[2].content[3].text: expected a string, got a number");
}

proptest::proptest! {
    #[test]
    fn agrees_with_serde_json(text in r#"[\[\]{},:"\\a-fntu0-9.eE +-]{0,40}"#) {
        let ours = read(&text, |reader| reader.skip()).is_ok();
        let theirs = serde_json::from_str::<serde_json::Value>(&text);
        // serde_json refuses numbers that overflow f64; this reader leaves the range to the caller.
        let overflow = theirs.as_ref().is_err_and(|error| error.to_string().contains("out of range"));
        proptest::prop_assert!(ours == theirs.is_ok() || overflow, "{}: {} {:?}", text, ours, theirs);
    }

    #[test]
    fn strings_written_by_serde_json_are_read_back(text in proptest::prelude::any::<String>()) {
        let json = serde_json::to_string(&text).expect("a string");
        proptest::prop_assert_eq!(read(&json, |reader| reader.string().map(Cow::into_owned)), Ok(text));
    }
}
