// tests/text/chat_template_test.cc: templates in the style of real ones against Jinja2's text, errors with their line,
// limits. Goldens: tools/template_compare.py --goldens.
#include "text/chat_template.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "io/file.h"
#include "support/property.h"
#include "text/utf8.h"

namespace livequant {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kTemplates[] = LIVEQUANT_SOURCE_DIR "/tests/text/templates";

std::string Rendered(const std::string& source, const ordered_json& variables = ordered_json::object(),
                     const ChatTemplateLimits& limits = {}) {
  const Result<ChatTemplate> chat = ChatTemplate::Parse(source);
  if (!chat.ok()) return chat.status().ToString();
  const Result<std::string> text = chat->Render(variables, 1718000000, limits);
  return text.ok() ? *text : text.status().ToString();
}

TEST(ChatTemplate, EveryGoldenIsEqual) {
  const ordered_json goldens = ordered_json::parse(*ReadFile(std::string(kTemplates) + "/goldens.json"));
  ASSERT_EQ(goldens["templates"].size(), 6u);
  int errors = 0;
  for (const auto& [name, texts] : goldens["templates"].items()) {
    const ChatTemplate chat = *ChatTemplate::Parse(*ReadFile(std::string(kTemplates) + "/" + name + ".jinja"));
    ASSERT_EQ(texts.size(), goldens["cases"].size());
    for (size_t i = 0; i < texts.size(); ++i) {
      const Result<std::string> text = chat.Render(goldens["cases"][i], 1718000000);
      if (texts[i].is_null()) {
        EXPECT_FALSE(text.ok()) << name << " " << i;
        ++errors;
      } else {
        ASSERT_TRUE(text.ok()) << name << " " << i << " " << text.status().ToString();
        EXPECT_EQ(*text, texts[i].get<std::string>()) << name << " " << i;
      }
    }
  }
  EXPECT_GT(errors, 10);
}

TEST(ChatTemplate, WhiteSpaceAroundTags) {
  EXPECT_EQ(Rendered("a\n  {% if true %}\nb\n  {% endif %}\nc\n"), "a\nb\nc");
  EXPECT_EQ(Rendered("a  {%- if true -%}  b  {%- endif -%}  c"), "abc");
  EXPECT_EQ(Rendered("  {{ 1 }}  \n  {{- 2 -}}  \n3"), "  123");
  EXPECT_EQ(Rendered("  {%+ if true +%}\nb{% endif %}"), "  \nb");
  EXPECT_EQ(Rendered("a\n  {# note #}\nb{#- x -#}  c"), "a\nbc");
  EXPECT_EQ(Rendered("a\r\nb\n\n"), "a\nb\n");
  EXPECT_EQ(Rendered("{% raw %}{{ x }}{% endraw %}"), "{{ x }}");
  EXPECT_EQ(Rendered("{{ {'a': {'b': 1}}['a']['b'] }}"), "1");
}

TEST(ChatTemplate, ScopesAreJinjas) {
  EXPECT_EQ(Rendered("{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}"), "231");
  EXPECT_EQ(Rendered("{% set n = namespace(x=1) %}{% for i in [1, 2] %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}"),
            "4");
  EXPECT_EQ(Rendered("{% if true %}{% set x = 5 %}{% endif %}{{ x }}"), "5");
  EXPECT_EQ(Rendered("{% set x = 1 %}{% macro m() %}{{ x }}{{ loop is defined }}{% endmacro %}"
                     "{% for i in [1] %}{% set x = 2 %}{{ m() }}{% endfor %}"),
            "1False");
}

TEST(ChatTemplate, ErrorsNameTheirLine) {
  const struct {
    const char* source;
    const char* code;
    const char* says;
  } cases[] = {
      {"a\n{% if x %}", "invalid_argument", "line 2"},
      {"{% for x y %}", "invalid_argument", "where in belongs"},
      {"{{ 'a }}", "invalid_argument", "a string without an end"},
      {"{{ a", "invalid_argument", "a tag without an end"},
      {"{# a", "invalid_argument", "a comment without an end"},
      {"{% raw %}", "invalid_argument", "raw without endraw"},
      {"\n\n{{ ! }}", "invalid_argument", "line 3: \"!\" begins no token"},
      {"{{ }}", "invalid_argument", "where an expression belongs"},
      {"{{ '\\ud800' }}", "invalid_argument", "no character"},
      {"{{ '\\u12' }}", "invalid_argument", "without its digits"},
      {"{% endif %}", "unsupported", "\"endif\""},
      {"{% include 'x' %}", "unsupported", "\"include\""},
      {"{% break %}", "invalid_argument", "outside of a loop"},
      {"{% for a in b recursive %}{% endfor %}", "unsupported", "recursive"},
      {"{{ f(*x) }}", "unsupported", "unpacked"},
      {"{{ 99999999999999999999 }}", "out_of_range", "63 bits"},
      {"{{ x.y.z }}", "invalid_argument", "\"x\" is undefined"},
      {"{{ 'a' + x }}", "invalid_argument", "\"x\" is undefined"},
      {"{{ 'a' + 1 }}", "invalid_argument", "str + int"},
      {"{{ 1 // 0 }}", "invalid_argument", "division by zero"},
      {"{{ 9223372036854775807 + 1 }}", "out_of_range", "64 bits"},
      {"{{ 1 < 'a' }}", "invalid_argument", "no order"},
      {"{{ x() }}", "invalid_argument", "\"x\" is undefined"},
      {"{{ 'a'|nothing }}", "unsupported", "filter \"nothing\""},
      {"{{ 'a' is nothing }}", "unsupported", "test \"nothing\""},
      {"{{ 'a'.nothing() }}", "unsupported", "method of a str \"nothing\""},
      {"{{ {'items': 1}.items }}", "unsupported", "without a call"},
      {"{{ '%s' % 1 }}", "unsupported", "formatting"},
      {"{{ x|tojson }}", "invalid_argument", "has no JSON"},
      {"{{ {1: 2} }}", "unsupported", "key of a dict"},
      {"{{ [namespace()] }}", "unsupported", "inside a list"},
      {"{{ raise_exception('no\xC3\xA9') }}", "invalid_argument", "raised: \"no\\xc3\\xa9\""},
      {"{% set a, b = [1] %}", "invalid_argument", "1 values for 2 names"},
      {"{% set x.y = 1 %}", "invalid_argument", "no namespace"},
      {"{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", "invalid_argument", "takes 1 arguments, not 2"},
      {"{% macro m(a) %}{% endmacro %}{{ m(b=2) }}", "invalid_argument", "has no argument"},
      {"{{ range(1, 2, 0)|list }}", "invalid_argument", "step 0"},
      {"{{ [1][::0] }}", "invalid_argument", "step 0"},
      {"{{ strftime_now('') }}", "invalid_argument", "1 to 256"},
      {"{% for x in 5 %}{% endfor %}", "invalid_argument", "not iterable"},
  };
  for (const auto& c : cases)
    EXPECT_THAT(Rendered(c.source), AllOf(HasSubstr(c.code), HasSubstr("line "), HasSubstr(c.says))) << c.source;
  EXPECT_THAT(ChatTemplate::Parse("{{ strftime_now('%Y') }}")->Render(ordered_json::object()).status().ToString(),
              HasSubstr("no date was given"));
  EXPECT_THAT(Rendered("a", ordered_json::array()), HasSubstr("not an object"));
  EXPECT_THAT(Rendered("a", {{"x", "\xFF"}}), HasSubstr("variable \"x\": a string is not UTF-8 at byte 0"));
  EXPECT_THAT(Rendered("\xFF"), HasSubstr("not UTF-8 at byte 0"));
  EXPECT_THAT(Rendered(std::string((1 << 20) + 1, 'a')), HasSubstr("limit 1048576"));
}

TEST(ChatTemplate, EverythingEnds) {
  const auto repeated = [](const std::string& text, int n) {
    std::string out;
    for (int i = 0; i < n; ++i) out += text;
    return out;
  };
  for (const std::string& source : {
           std::string("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
           std::string("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
           std::string("{% set x = 'a' %}" + repeated("{% set x = x + x %}", 60)),
           std::string("{% set x = 'a' %}" + repeated("{% set x = x ~ x %}", 60)),
           std::string("{% set x = 'ab' %}" + repeated("{% set x = x|replace('a', x) %}", 60)),
           std::string("{% set x = [1] %}" + repeated("{% set x = x + x %}", 60)),
           std::string("{% set x = [1] %}" + repeated("{% set x = [x, x] %}", 60) + "{{ x }}"),
           std::string("{% set x = [1] %}" + repeated("{% set x = [x, x] %}", 60) + "{{ x|tojson }}"),
           std::string("{% set x = [1] %}" + repeated("{% set x = [x, x] %}", 60) + "{% set y = [1] %}" +
                       repeated("{% set y = [y, y] %}", 60) + "{{ x == y }}"),
           std::string("{% set n = namespace(x=[]) %}{% for i in range(999) %}{% set n.x = [n.x] %}{% endfor %}"),
           std::string("{{ 'a' * 999999999999 }}"),
           std::string("{{ [1] * 999999999999 }}"),
           std::string("{{ range(999999999) }}"),
           std::string("{{ 2 ** 9999999 }}"),
           repeated("(", 5000),
           "{{ " + repeated("(", 5000),
           "{{ " + repeated("not ", 5000),
           "{{ " + repeated("-", 5000) + "1 }}",
           "{{ " + repeated("1 + ", 5000) + "1 }}",
           "{{ x" + repeated(".a", 5000) + " }}",
           "{{ x" + repeated("|e", 5000) + " }}",
           "{{ " + repeated("[", 5000),
           "{{ " + repeated("1 if ", 5000),
           repeated("{% if 1 %}", 5000),
       }) {
    const std::string said = Rendered(source, ordered_json::object(), {1000000, 8 << 20});
    if (source[0] == '(') continue;
    EXPECT_THAT(said.substr(0, 200), ::testing::AnyOf(HasSubstr("out_of_range"), HasSubstr("invalid_argument")))
        << source.substr(0, 80);
  }
  EXPECT_THAT(Rendered("{{ 'abc' }}", ordered_json::object(), {100, 2}), HasSubstr("out_of_range"));
  ordered_json deep = 1;
  for (int i = 0; i < 100; ++i) deep = ordered_json::array({deep});
  EXPECT_THAT(Rendered("a", {{"x", deep}}), HasSubstr("deeper than 64"));
}

TEST(ChatTemplate, LoadsFromAModelDirectory) {
  const std::string directory = ::testing::TempDir() + "/chat_template_" + std::to_string(::getpid());
  std::filesystem::create_directories(directory);
  EXPECT_EQ(ChatTemplate::Load(directory).status().code(), Code::kNotFound);
  const auto write = [&](const char* name, const std::string& text) { std::ofstream(directory + "/" + name) << text; };
  write("tokenizer_config.json",
        R"({"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": null, )"
        R"("chat_template": "{{ bos_token ~ x ~ eos_token }}"})");
  EXPECT_EQ(*ChatTemplate::Load(directory)->Render({{"x", 1}}), "<s>1</s>");
  EXPECT_EQ(ChatTemplate::Load(directory, "tool_use").status().code(), Code::kNotFound);
  write("tokenizer_config.json",
        R"({"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]})");
  EXPECT_EQ(*ChatTemplate::Load(directory)->Render(ordered_json::object()), "d");
  EXPECT_EQ(*ChatTemplate::Load(directory, "tool_use")->Render(ordered_json::object()), "t");
  write("chat_template.jinja", "file");
  EXPECT_EQ(*ChatTemplate::Load(directory)->Render(ordered_json::object()), "file");
  std::filesystem::remove(directory + "/chat_template.jinja");
  write("tokenizer_config.json", R"({"chat_template": [{"name": "default"}]})");
  EXPECT_THAT(ChatTemplate::Load(directory).status().ToString(), HasSubstr("chat_template[0]"));
  write("tokenizer_config.json", R"({"chat_template": 3})");
  EXPECT_THAT(ChatTemplate::Load(directory).status().ToString(), HasSubstr("chat_template is number"));
  write("tokenizer_config.json", R"([1])");
  EXPECT_THAT(ChatTemplate::Load(directory).status().ToString(), HasSubstr("not an object"));
  std::filesystem::remove_all(directory);
}

// Edited templates render or are refused; nothing else.
TEST(ChatTemplate, EditedTemplatesAreTotal) {
  std::vector<std::string> sources;
  for (const char* name : {"chatml", "headers", "inst", "think", "tour", "turns"})
    sources.push_back(*ReadFile(std::string(kTemplates) + "/" + name + ".jinja"));
  const ordered_json goldens = ordered_json::parse(*ReadFile(std::string(kTemplates) + "/goldens.json"));
  int rendered = 0;
  ForAll(2000, [&](Rng& rng) {
    std::string edited = sources[static_cast<size_t>(rng.Range(0, 5))];
    for (int64_t n = rng.Range(1, 3); n > 0; --n) {
      const auto at = static_cast<size_t>(rng.Range(0, static_cast<int64_t>(edited.size()) - 1));
      const std::string& from = sources[static_cast<size_t>(rng.Range(0, 5))];
      const auto begin = static_cast<size_t>(rng.Range(0, static_cast<int64_t>(from.size()) - 1));
      if (rng.Chance(0.5)) {
        edited.erase(at, static_cast<size_t>(rng.Range(1, 12)));
      } else {
        edited.insert(at, from.substr(begin, static_cast<size_t>(rng.Range(1, 20))));
      }
    }
    const auto chat = ChatTemplate::Parse(edited);
    if (!chat.ok()) return;
    const auto text = chat->Render(goldens["cases"][static_cast<size_t>(rng.Range(0, 23))], 1, {100000, 1 << 20});
    if (!text.ok()) return;
    ++rendered;
    EXPECT_EQ(InvalidUtf8At(*text), std::string::npos);
  });
  EXPECT_GT(rendered, 20);
}

}  // namespace
}  // namespace livequant
